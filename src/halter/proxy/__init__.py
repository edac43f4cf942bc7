"""`halter proxy`: an HTTP proxy to model providers that holds the cost of each request before it is sent."""
