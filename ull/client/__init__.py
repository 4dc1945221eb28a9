"""Clients of the daemon: the blocking one, the one for asyncio, and the transports below them."""
