"""One request on its way: choices, their dispatch, again where a server dies, and the answers."""
