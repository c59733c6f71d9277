"""The prefill side: memory that is lent until it was read, given back, or its time is over; epochs say so."""
