"""HTTP itself, independent of the endpoint: connections, the server, events, errors, the end of a process."""
