"""A run's folder -> a local web page about it. Reads only: nothing in the folder is ever changed."""
