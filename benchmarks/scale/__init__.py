"""How costs grow with requests, contexts and servers."""
