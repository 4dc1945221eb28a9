"""What `ull install --systemd` puts on a machine: units, a drop-in for its cores, and the settings around them."""
