"""The OpenAI gateway: HTTP and websockets for those who speak no ZeroMQ. A process of its own, never in the daemon."""
