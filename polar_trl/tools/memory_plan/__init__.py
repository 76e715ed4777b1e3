"""Plan the GPU memory of a run before it starts: `polar-trl plan`."""
