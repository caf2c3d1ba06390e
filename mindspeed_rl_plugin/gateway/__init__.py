"""The gateway between agents and engines: agents' processes, the HTTP endpoints that they call, and their messages."""
