"""Other programs' agents under the same brakes: a proxy to model providers that holds money before it asks."""
