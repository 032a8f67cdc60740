"""``user-sys hardware`` and ``user-sys node``: what there is, how it fares, who may use it."""
