"""Files and formats that login node, batch host, agents and driver share."""
