"""What one run of the user's program does: its calls, what they read and what they make."""
