"""Cut a recorded program into layers."""
