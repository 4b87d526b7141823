"""Where paths between two engines are chosen, rested and capped. Pure: no sockets, no threads, no clock."""
