"""How figures grow with requests, contexts and servers."""
