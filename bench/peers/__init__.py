"""The same work in other frameworks: each module here runs in a virtual environment of its own."""
