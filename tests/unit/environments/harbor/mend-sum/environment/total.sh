total() { echo $(($1 - $2)); }
