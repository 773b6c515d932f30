"""What is measured, and with which clock."""
