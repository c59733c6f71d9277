"""The lending side: leases, and the epochs that show readers whether a lease has ended."""
