"""MuJoCo robots that learn for real."""
