"""Every message of the ring; each inbox has one closed union, named after its receiver."""
