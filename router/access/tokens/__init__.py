"""Bearer tokens of an issuer: their claims, and the keys that sign them."""
