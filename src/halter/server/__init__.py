"""The HTTP server: API, streams, webhooks and login."""
