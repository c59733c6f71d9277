"""The prefill side: leases end when they are read, given up or expired. Their epochs show readers the end."""
