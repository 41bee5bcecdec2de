"""Training jobs: what they are, their files, and the program that trains them."""
