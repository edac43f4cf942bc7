"""A whole runtime in virtual time, with proven fakes and crashes on demand, for testing agents."""
