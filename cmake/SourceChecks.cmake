# Checks of the source text itself.

# Every header of a room compiles alone: in its own source, or else in a tiny translation unit of the build.
add_custom_target(headers_compile_alone ALL DEPENDS all_verify_interface_header_sets)

function(linkcpp_source_check name)
  add_test(NAME ${name} COMMAND ${ARGN})
  set_tests_properties(${name} PROPERTIES TIMEOUT 60 LABELS source SKIP_RETURN_CODE 77)
endfunction()

linkcpp_source_check(rooms_include_only_what_the_table_allows ${PROJECT_SOURCE_DIR}/scripts/check-rooms)
linkcpp_source_check(planted_includes_are_found ${PROJECT_SOURCE_DIR}/scripts/check-rooms --self-test)
linkcpp_source_check(clang_format_is_clean ${PROJECT_SOURCE_DIR}/scripts/check-format)
