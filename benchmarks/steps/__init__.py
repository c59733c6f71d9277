"""One step: where its time goes, and what the machine could do at best."""
