"""What programs send and hold, and for how long. May import all rooms, and none imports it."""
