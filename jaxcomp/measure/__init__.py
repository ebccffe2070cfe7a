"""What programs send and hold, and how long they take. May import all rooms; none imports it."""
