"""Triton's interpreter, made to find what a GPU would punish and an interpreter forgives.

| a kernel that | is found, because |
|---|---|
| depends on the order of its programs | they run in a random order; a launch of a new kind runs twice |
| reads or writes what another program writes | programs' addresses are compared |
| exchanges data between threads without a barrier | addresses between two barriers are compared |
| leaves its operands | an address must belong to an element of one of them |
| uses memory that belongs to nobody | it holds NaN, and other values in the second run |
| computes an index beyond 32 bits in 32 bits | products of int32 may not overflow |

`operands` holds the copies between guards, `accesses` the rules on addresses, `interpreter` the runs.
"""
