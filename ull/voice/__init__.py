"""Voice agents: turns that are read, and answered, while their speaker still speaks; plug-ins of voice frameworks."""
