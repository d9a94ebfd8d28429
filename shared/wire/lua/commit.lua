-- Middle hops, as `each` takes them; the words are writes. The owner's first commit takes the input and makes them all.
return each(function(at, last) return bad_writes(at + 5, last) end, function(at, last)
  local why = accept(at)
  if why then return why end
  write(at + 5, last)
  return 'OK'
end)
