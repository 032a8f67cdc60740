"""How a robot passes from one action chunk to the next while the policy computes: one file for each method."""
