"""HTTP itself, whatever is asked for: connections, the server, events, errors, the end of a process."""
