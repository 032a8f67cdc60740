"""One file for each kind of robot."""
