"""A fleet under load whose servers are killed, frozen and drained at random: is every answer still right?"""
