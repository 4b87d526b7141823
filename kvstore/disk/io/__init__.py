"""How bytes get to and from the disk: on-disk format, folder, encryption, segment files, threads, io_uring."""
