"""Training jobs: their settings, their files, and the program that trains them."""
