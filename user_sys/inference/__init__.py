"""A policy that acts elsewhere than in the session's process: in a policy process, on a GPU at the robots' site."""
