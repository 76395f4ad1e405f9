"""The host before anything is started: driver, container toolkit, devices, bus, memory, disk."""
