"""Record of one run of the user's program: its calls, what they read and what they make."""
