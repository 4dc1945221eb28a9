"""A daemon's figures for Prometheus: what they are called, and the server that monitors ask for them.

It is a client of the daemon in a process of its own: no monitor's question, and no call into the GPU's driver, takes
time of the daemon's threads, and one that hangs is reported by somebody who does not.
"""
