"""Experience in other people's formats: LeRobot data sets in and out, MCAP recordings out."""
