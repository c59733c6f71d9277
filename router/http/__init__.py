"""What the router does for every HTTP request, whatever it asks for."""
