"""What pushes do on GPUs; the only part of `user_sys.weights` that needs torch."""
