# Tests of the source text itself.

# Every header of a room compiles alone: part of the build, one tiny translation unit for each.
add_custom_target(headers_compile_alone ALL DEPENDS all_verify_interface_header_sets)
