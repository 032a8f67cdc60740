"""Import and export: LeRobot datasets and MCAP recordings."""
