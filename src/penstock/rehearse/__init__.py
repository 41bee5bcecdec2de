"""The real runtime with emulated compute and links: a plan for many devices, carried out on one."""
