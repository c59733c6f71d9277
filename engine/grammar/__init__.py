"""Which tokens an answer's grammar allows next, computed in processes beside the step loop."""
