"""The mixers and MLPs that make up blocks."""
