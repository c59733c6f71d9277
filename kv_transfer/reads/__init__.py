"""The reading side: what is read from which server, in which parts, and when a quarantine ends."""
