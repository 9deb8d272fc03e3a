"""What all parts share to use the operating system safely: threads that survive a fork, folders that root may trust."""
