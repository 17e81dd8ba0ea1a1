"""What the tests stand on: private servers, real workers, a proxy that breaks connections."""
